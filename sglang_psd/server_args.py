"""SGLang's ServerArgs with the PSD fields added.

A dataclass subclass, put in place of the original by the plugin: flags, ``--help``, Engine keywords,
pickling, ``dataclasses.replace`` and ``/server_info`` all follow from the field definitions. Child
processes import this module while unpickling, so importing it has no side effects.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from typing import Any

from sglang.srt.arg_groups.arg_utils import NS, A, Arg
from sglang.srt.server_args import ServerArgs

from sglang_psd.attention import fill_attention_backend
from sglang_psd.config import (
    ALGORITHM,
    DRAFT_METHODS,
    DTYPES,
    FLAG_FIELDS,
    MODES,
    PSDConfig,
    flag_name,
    load_config_source,
    resolve_config,
    uses_psd,
)
from sglang_psd.draft_method import read_config, readable_draft
from sglang_psd.errors import PSDConfigError, PSDError
from sglang_psd.resources import check_checkpoint


def keep_draft_quantization(args: Any) -> None:
    """The draft keeps what its own checkpoint says; SGLang would give it the target's ``--quantization``."""
    if args.speculative_draft_model_quantization is None:
        args.speculative_draft_model_quantization = "unquant"


def read_mode(text: str) -> str:
    """A value of ``--psd-mode``; in SGLang's ``--config`` YAML reads an unquoted ``off`` as false."""
    return "off" if text == "false" else text


@dataclasses.dataclass
class PSDServerArgs(ServerArgs):
    """ServerArgs plus the ``--psd-*`` flags.

    Raises
    ------
    PSDConfigError
        From construction, when a PSD flag holds a bad value; the message names the flag.
    """

    psd_mode: A[
        str | None,
        Arg(
            help="Parallel speculative decoding: 'parallel' alternates two batches between drafter and target "
            "(default), 'sequential' uses one batch, 'off' serves as stock SGLang without a drafter.",
            choices=list(MODES),
            type_parser=read_mode,
        ),
        NS("spec"),
    ] = None
    psd_draft_method: A[
        str | None,
        Arg(
            help="PSD: what --speculative-draft-model-path is: a draft model, or an EAGLE or EAGLE-3 head, which reads "
            "the target's hidden states. Default: as the checkpoint's config says.",
            choices=list(DRAFT_METHODS),
        ),
        NS("spec"),
    ] = None
    psd_drafter_device: A[
        str | None,
        Arg(help="PSD: device of the drafter process, cuda:N or cpu. Default: the GPU after the target's."),
        NS("spec"),
    ] = None
    psd_drafter_mem_fraction: A[
        float | None,
        Arg(
            help="PSD: share of the drafter GPU's memory for its weights and KV cache. Default: 0.8 on a GPU of "
            "its own, 0.1 on the target's."
        ),
        NS("spec"),
    ] = None
    psd_drafter_attention_backend: A[
        str | None,
        Arg(help="PSD: attention backend of the drafter. Default: the target's."),
        NS("spec"),
    ] = None
    psd_drafter_dtype: A[
        str | None,
        Arg(help="PSD: dtype of the drafter, as --dtype. Default: the draft checkpoint's own.", choices=list(DTYPES)),
        NS("spec"),
    ] = None
    psd_proposal_top_m: A[
        int | None,
        Arg(
            help="PSD: for sampled requests the drafter draws from its m most likely tokens and sends their "
            "probabilities (default 32). Never changes the distribution of the output."
        ),
        NS("spec"),
    ] = None
    psd_trace: A[
        str | None,
        Arg(help="PSD: write one JSON line per round to this file."),
        NS("spec"),
    ] = None
    psd_config: A[
        str | None,
        Arg(help="PSD: all options as a JSON object or the path of a JSON file; explicit flags win."),
        NS("spec"),
    ] = None

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> PSDServerArgs:
        """As SGLang's; a bad PSD flag ends the command as argparse ends it, with its sentence and code 2."""
        try:
            return super().from_cli_args(args)
        except PSDError as error:
            print(f"{os.path.basename(sys.argv[0])}: error: {error}", file=sys.stderr)
            raise SystemExit(2) from None

    def __post_init__(self) -> None:
        from sglang_psd.cpu import defaults

        if defaults.cpu_only():
            defaults.fill_server_args(self)
        if not uses_psd(self):
            self._refuse_orphan_flags()
        else:
            if self.psd_config is not None:
                # A file is read once, by the launcher: it may be a pipe, and every rank has to have the same.
                self.psd_config = json.dumps(dict(load_config_source(self.psd_config)))
            config = self.psd()
            for field in FLAG_FIELDS:
                setattr(self, "psd_" + field, getattr(config, field))
            if config.mode == "off":
                self._step_aside()
            else:
                if self.speculative_draft_model_path is not None:
                    check_checkpoint("--speculative-draft-model-path", self.speculative_draft_model_path, "draft")
                keep_draft_quantization(self)
                fill_attention_backend(self)
        try:
            super().__post_init__()
        except OSError:
            if uses_psd(self):
                self._blame_unreadable_draft()
            raise

    def check_server_args(self) -> None:
        """As SGLang's, right before the scheduler is spawned: its drafter may begin with it."""
        super().check_server_args()
        if uses_psd(self) and self.node_rank == 0:
            from sglang_psd.scheduler.launch import offer_early_start

            offer_early_start(self)

    def psd(self) -> PSDConfig:
        """The resolved options (flags over ``--psd-config`` over defaults)."""
        return resolve_config({f: getattr(self, "psd_" + f) for f in FLAG_FIELDS}, self.psd_config)

    def _refuse_orphan_flags(self) -> None:
        given = [flag_name(f) for f in FLAG_FIELDS if getattr(self, "psd_" + f) is not None]
        if self.psd_config is not None:
            given.append("--psd-config")
        if given and self.psd_mode != "off":
            raise PSDConfigError(
                f"{given[0]} has no effect without --speculative-algorithm {ALGORITHM}; add that flag."
            )

    def _blame_unreadable_draft(self) -> None:
        """Say so when it is the draft's config that SGLang could not read."""
        path = str(self.speculative_draft_model_path)
        with readable_draft(path):
            read_config(path, self.trust_remote_code, self.speculative_draft_model_revision)

    def _step_aside(self) -> None:
        """``--psd-mode off``: stock SGLang, at its own speed, with nothing of PSD in its way."""
        self.speculative_algorithm = None
        self.speculative_draft_model_path = None
        self.speculative_num_steps = None
        self.speculative_num_draft_tokens = None
        self.speculative_eagle_topk = None
