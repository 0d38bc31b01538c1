"""Entry points that vLLM and SGLang call in each of their processes: with ONEHOP_ENGINES=1 onehop sums for them.

Without it nothing is done, and nothing imported. Whatever goes wrong is one line in the log: a start never fails
because of these. docs/engines.md tells more.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

__all__ = ["sglang", "vllm"]


def wanted() -> bool:
    """Whether ONEHOP_ENGINES says so."""
    return os.environ.get("ONEHOP_ENGINES", "").strip().lower() in ("1", "true", "yes", "on")


def safely(engine: str, log: logging.Logger, install: Callable[[], list[str]]) -> None:
    """Installs a hook; says in one line why not, if so. `install` returns what does not fit."""
    try:
        wrong = install()
    except Exception as error:  # of whatever kind: the engine starts without us
        wrong = [f"{type(error).__name__}: {error}".splitlines()[0]]
    if wrong:
        log.warning("onehop is not used in this %s: %s", engine, "; ".join(wrong))


def vllm() -> None:
    """Entry point of the group vllm.general_plugins."""
    if wanted():
        from onehop import _hook_vllm

        safely("vLLM", _hook_vllm.log, _hook_vllm.install)


def sglang() -> None:
    """Entry point of the group sglang.srt.plugins."""
    if wanted():
        from onehop import _hook_sglang

        safely("SGLang", _hook_sglang.log, _hook_sglang.install)
