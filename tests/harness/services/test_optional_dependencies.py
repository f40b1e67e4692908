"""Optional dependencies: which of them a learner loads."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

PROGRAM = """
import sys
from rollstream.harness.services.optional_dependencies import skip_scikit_learn

skip_scikit_learn()
import rollstream.learner.worker

assert "transformers.generation.candidate_generator" in sys.modules
assert "sklearn" not in sys.modules
import sklearn
from transformers.utils import is_sklearn_available

assert is_sklearn_available()
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("sklearn") is None, reason="only another package brings scikit-learn")
def test_a_learner_starts_without_scikit_learn_and_users_code_can_still_use_it() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
