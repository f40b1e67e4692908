"""Logs how far a loss or gradient is from its equation in float64: the figures of docs/algorithms.md.

python -m pytest tests/learner/algorithms/test_parity.py --log-cli-level=INFO
"""

import logging
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)


def log_difference(name: str, part: str, found: Any, wanted: Any) -> None:
    """Log the largest relative difference of a value from what is wanted, where that is not 0."""
    one, other = (np.asarray(values, np.float64).ravel() for values in (found, wanted))
    counted = other != 0
    largest = float(np.max(np.abs(one - other)[counted] / np.abs(other[counted]))) if counted.any() else 0.0
    logger.info("algorithm=%s part=%s relative_difference=%.0e", name, part, largest)
