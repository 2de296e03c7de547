"""Named errors. Each message is one sentence that names the flag at fault and the remedy."""


class PSDError(Exception):
    """Base of every error this package raises on purpose."""


class PSDConfigError(PSDError, ValueError):
    """A flag, keyword or config file holds a value that cannot work."""


class UnsupportedFeatureError(PSDConfigError):
    """A valid SGLang feature that PSD cannot serve yet."""


class DraftMismatchError(PSDConfigError):
    """Target and draft model do not speak the same token ids."""


class DrafterStartError(PSDError, RuntimeError):
    """The drafter process did not become ready."""


class ProtocolError(PSDError, RuntimeError):
    """A message on the drafter channel is malformed or of another schema version."""


class UnsendableError(ProtocolError):
    """One message cannot go over the drafter channel; the channel itself is sound."""


class ChannelDamagedError(ProtocolError):
    """The drafter channel itself is of no use any more; both ends give it up."""


class EndpointError(PSDError, OSError):
    """The drafter channel has no address, or one that others could reach."""


class PatchError(PSDError, RuntimeError):
    """A hook in the ledger no longer fits the installed SGLang."""
