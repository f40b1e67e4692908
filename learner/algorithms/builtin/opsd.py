"""On-policy self-distillation: the teacher is the policy as the job began, with text that the policy does not see."""

from rollstream.learner.algorithms.builtin.opd import Opd
from rollstream.schemas.algorithms import OpsdSettings


class Opsd(Opd):
    """As on-policy distillation (arXiv 2601.18734, "Self-Distilled Reasoner": a fixed teacher with the solution)."""

    Settings = OpsdSettings  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]
