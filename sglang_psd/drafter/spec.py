"""What a drafter process is told when it starts."""

from __future__ import annotations

import msgspec


class HeadSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an EAGLE head needs besides its checkpoint.

    Attributes
    ----------
    feature_size : int
        Numbers per token that the target hands over.
    mailbox_rows : int
        Room for hidden states that have not been read.
    context_len : int
        The target's: heads are published with shorter ones than they can draft for.
    target_path, target_revision, target_load_format
        Checkpoint that embedding and output matrix are taken from, as SGLang's flags of the same meaning.
    token_map : str or None
        File of the token ids that an EAGLE head may propose, as SGLang's ``--speculative-token-map``.
    """

    feature_size: int
    mailbox_rows: int
    context_len: int
    target_path: str
    target_revision: str | None = None
    target_load_format: str = "auto"
    token_map: str | None = None


class DrafterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Start-up parameters, passed to the process as JSON.

    Attributes
    ----------
    endpoint, pulse_endpoint : str
        ZMQ addresses to connect to: for messages, and for the sign of life.
    lanes : str
        File of shared memory beside the endpoint; empty when there is none.
    spin_s : float
        How long to look for a message before sleeping.
    schema_version : int
        Of the scheduler's messages.
    parent_pid : int
        The scheduler; the drafter does not outlive it.
    model_path, revision, load_format, quantization, trust_remote_code
        The draft checkpoint, as SGLang's flags of the same meaning.
    device : str
        ``cuda`` (the one visible device) or ``cpu``.
    device_label : str
        How the server's user names that device, for messages.
    dtype, attention_backend : str
    mem_fraction : float
        Share of the device's memory for weights and KV.
    max_requests : int
        Most requests open at once.
    vocab_limit : int
        Ids from here on are never proposed (padding of either vocabulary).
    num_steps, top_m : int
        Longest chain; size of the sparse law.
    random_seed : int
    context_length : int or None
        Overrides the checkpoint's.
    kv_tokens : int or None
        Upper bound of the KV pool.
    cuda_graphs, deterministic : bool
        As the target's.
    shares_device : bool
        Whether the target works on the same device: what is done beside a verify makes it last longer.
    integrity_checks : bool
        Check the pools after every round.
    head : HeadSpec or None
        None when the checkpoint is a model of its own.
    log_level : str
    import_niceness : int
        What a standby adds to its niceness while it imports: 10 takes a tenth of a busy core, at 19 it would not end
        under load; 0 where the server's start waits for it.
    """

    endpoint: str
    parent_pid: int
    model_path: str
    device: str
    device_label: str
    dtype: str
    attention_backend: str
    mem_fraction: float
    max_requests: int
    vocab_limit: int
    num_steps: int
    top_m: int
    random_seed: int
    revision: str | None = None
    load_format: str = "auto"
    quantization: str | None = None
    trust_remote_code: bool = False
    context_length: int | None = None
    kv_tokens: int | None = None
    cuda_graphs: bool = True
    deterministic: bool = False
    shares_device: bool = False
    integrity_checks: bool = False
    pulse_endpoint: str = ""
    lanes: str = ""
    spin_s: float = 0.0
    schema_version: int = 0
    head: HeadSpec | None = None
    log_level: str = "info"
    import_niceness: int = 10
