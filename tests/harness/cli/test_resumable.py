"""When `finetune` ends before its run, it shows how to continue."""

import errno

import pytest

from rollstream.harness.cli.main import one_line
from rollstream.harness.finetune import _resumable
from rollstream.schemas.errors import LogError, StoreUnavailableError

FULL = OSError(errno.ENOSPC, "No space left on device", "/data/out")


@pytest.mark.parametrize("error", [LogError(), StoreUnavailableError("away"), FULL, TimeoutError("late")], ids=repr)
def test_an_error_of_an_open_run_has_the_command_that_resumes_it(error: Exception) -> None:
    with pytest.raises(type(error)) as message, _resumable("mine-1", is_open=True):
        raise error
    assert "run mine-1 stays open: `rollstream finetune --config_file FILE --resume mine-1`" in one_line(message.value)
    assert getattr(message.value, "errno", None) == getattr(error, "errno", None)
    with pytest.raises(type(error)) as same, _resumable("mine-1", is_open=False):
        raise error
    assert same.value is error
