"""The scheduler class that takes SGLang's place.

In a module of its own: it must import the original class before the plugin replaces it.
"""

from sglang.srt.managers.scheduler import Scheduler

from sglang_psd.scheduler.mixin import PSDSchedulerMixin


class PSDScheduler(PSDSchedulerMixin, Scheduler):
    """SGLang's scheduler; behaves as stock unless ``--speculative-algorithm PSD`` is given."""
