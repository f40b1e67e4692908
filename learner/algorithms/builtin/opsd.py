"""On-policy self-distillation: the teacher is the policy at the job's start, with text that the policy does not see."""

from rollstream.learner.algorithms.builtin.opd import Opd
from rollstream.schemas.algorithms import OpsdSettings


class Opsd(Opd):
    """On-policy distillation by a fixed teacher that has the solution ("Self-Distilled Reasoner", arXiv 2601.18734v3,
    equation 9).
    """

    Settings = OpsdSettings  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]
