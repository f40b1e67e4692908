"""Optional dependencies: which of them a learner loads."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

PROGRAM = """
import sys
from rollstream.harness.services.optional_dependencies import skip_unused_libraries

skip_unused_libraries()
import rollstream.learner.worker

assert "transformers.generation.candidate_generator" in sys.modules
assert "transformers.loss.loss_for_object_detection" in sys.modules
assert not {"sklearn", "scipy"} & set(sys.modules)
import scipy
import sklearn
from transformers.utils import is_scipy_available, is_sklearn_available

assert is_sklearn_available() and is_scipy_available()
from transformers.loss.loss_for_object_detection import linear_sum_assignment

rows, columns = linear_sum_assignment([[2, 1], [1, 2]])
assert columns.tolist() == [1, 0]
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("sklearn") is None, reason="only another package brings scikit-learn")
def test_a_learner_starts_without_scikit_learn_and_scipy_and_users_code_can_still_use_them() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
