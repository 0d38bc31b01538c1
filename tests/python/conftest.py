"""A deadline for everything: no test may hang."""

import faulthandler

import pytest

LIMIT_S = 60


@pytest.fixture(autouse=True)
def deadline():
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
