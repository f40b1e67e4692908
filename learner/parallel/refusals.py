"""Limits of training in several processes: the rule of the learner, which the harness checks before a run too."""

from rollstream.schemas.settings import JobSettings


def refused(settings: JobSettings) -> str:
    """The first setting of a job that several processes do not support; empty if they support all."""
    model, optimizer = settings.model, settings.optimizer
    odd = {
        f"model.device: {model.device} (auto and cpu are a device for each process)": model.device
        not in ("auto", "cpu"),
        f"optimizer.kind: {optimizer.kind}": optimizer.kind == "adamw_8bit",
    }
    return next((what for what, is_asked in odd.items() if is_asked), "")
