"""What several processes do not train together: the rule of the learner, which the harness asks before a run too."""

from rollstream.schemas.algorithm_settings import teacher_of
from rollstream.schemas.settings import JobSettings


def refused(settings: JobSettings) -> str:
    """What of a job several processes do not train; empty if they train it."""
    algorithm, model, optimizer = settings.algorithm, settings.model, settings.optimizer
    teacher = teacher_of(algorithm)
    is_own_teacher = algorithm.needs.teacher and teacher is not None and not teacher.path
    odd = {
        f"model.device: {model.device} (auto and cpu are a device for each process)": model.device
        not in ("auto", "cpu"),
        f"optimizer.kind: {optimizer.kind}": optimizer.kind != "adamw",
        "model.compile": model.compile,
        "model.quantization": model.quantization is not None,
        "optimizer.offload": optimizer.offload is not None,
        "a loss that compares with the policy's own earlier weights (a KL divergence, dpo, opsd)": (
            algorithm.needs.reference or is_own_teacher
        ),
    }
    return next((what for what, is_asked in odd.items() if is_asked), "")
