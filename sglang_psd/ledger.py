"""Holds the hooks against the installed SGLang: ``sglang-psd check``.

A ledger entry is a Markdown file in ``patches/`` whose head names the target, the SGLang version it was written
for and a fingerprint of the target's source. A changed fingerprint does not mean that the hook is broken, only that
somebody must look.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

from sglang_psd.errors import PatchError
from sglang_psd.hooks import HOOKS, Hook, resolve

_HEAD = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
REQUIRED_FIELDS = ("target", "kind", "sglang", "fingerprint", "reason")


@dataclass(frozen=True)
class Finding:
    """Result for one hook; ``problem`` is None when it fits."""

    name: str
    target: str
    problem: str | None


def patches_folder() -> Path:
    """Where the ledger lies: in the installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    for folder in (package / "_patches", package.parent / "patches"):
        if folder.is_dir():
            return folder
    raise PatchError("The hook ledger (patches/) is missing; reinstall sglang-psd.")


def read_entry(path: Path) -> dict[str, str]:
    """Parse the head of a ledger file.

    Raises
    ------
    PatchError
        The head is missing or lacks a field.
    """
    match = _HEAD.match(path.read_text(encoding="utf-8"))
    if match is None:
        raise PatchError(f"{path.name} has no head between --- lines.")
    parts = (line.partition(": ") for line in match.group(1).splitlines())
    fields = {name: value for name, _, value in parts}
    missing = [field for field in REQUIRED_FIELDS if not fields.get(field)]
    if missing:
        raise PatchError(f"{path.name} lacks the field {missing[0]!r}.")
    return fields


def fingerprint(target: str) -> str:
    """First 16 hex digits of the SHA-256 of the target's original source."""
    resolved = resolve(target)
    original = inspect.unwrap(resolved) if callable(resolved) and not isinstance(resolved, type) else resolved
    if isinstance(original, type):
        # A replaced class: look at the original below ours.
        original = next(cls for cls in original.__mro__ if not cls.__module__.startswith("sglang_psd"))
    return hashlib.sha256(inspect.getsource(original).encode()).hexdigest()[:16]


def check_hook(hook: Hook, folder: Path) -> Finding:
    """Compare one hook with its ledger entry and with SGLang."""
    path = folder / f"{hook.name}.md"
    if not path.is_file():
        return Finding(hook.name, hook.target, "has no entry in patches/")
    entry = read_entry(path)
    if (entry["target"], entry["kind"]) != (hook.target, hook.kind):
        return Finding(hook.name, hook.target, "differs from its ledger entry in target or kind")
    installed = importlib.metadata.version("sglang")
    try:
        found = fingerprint(hook.target)
    except (AttributeError, ImportError, OSError, TypeError) as error:
        return Finding(hook.name, hook.target, f"no longer exists in SGLang {installed} ({error})")
    if found != entry["fingerprint"]:
        return Finding(hook.name, hook.target, f"has changed between SGLang {entry['sglang']} and {installed}")
    return Finding(hook.name, hook.target, None)


def check_all() -> list[Finding]:
    """Check every hook, and that the ledger names no hook that is gone."""
    folder = patches_folder()
    findings = [check_hook(hook, folder) for hook in HOOKS]
    known = {hook.name for hook in HOOKS}
    for path in sorted(folder.glob("*.md")):
        if path.stem not in known and path.stem != "README":
            findings.append(Finding(path.stem, str(path.name), "names a hook that no longer exists"))
    return findings


def run_check(verbose: bool, fingerprints_only: bool) -> int:
    """Print the findings; 0 when everything fits."""
    if fingerprints_only:
        for hook in HOOKS:
            print(hook.name, fingerprint(hook.target))
        return 0
    findings = check_all()
    misfits = [finding for finding in findings if finding.problem]
    for finding in findings if verbose else misfits:
        verdict = "MISFIT" if finding.problem else "ok    "
        print(f"{verdict} {finding.name}: {finding.target} {finding.problem or ''}".rstrip())
    version = importlib.metadata.version("sglang")
    print(f"{len(findings) - len(misfits)} of {len(findings)} hooks fit SGLang {version}.")
    return 1 if misfits else 0
