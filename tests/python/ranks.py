"""Runs a function on several ranks, each a process of its own with a gloo group, all under a deadline."""

import contextlib
import faulthandler
import multiprocessing
import os
import queue
import tempfile
import time
import traceback

LIMIT_S = 40
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "onehop._all_reduce"])


def _main(function, rank, world_size, path, answers, arguments):
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    try:
        answers.put((rank, True, function(rank, world_size, *arguments)))
    except BaseException:
        answers.put((rank, False, traceback.format_exc()))
    answers.close()
    answers.join_thread()
    os._exit(0)  # a group whose peers are gone is not waited for


def run(world_size, function, *arguments, missing=()):
    """What `function(rank, world_size, *arguments)` returned on each rank; ranks in `missing` may die."""
    answers = _context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _context.Process(
                target=_main, args=(function, rank, world_size, f"{folder}/store", answers, arguments), daemon=True
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(world_size, answers, processes, missing)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(world_size, answers, processes, missing):
    end, found = time.monotonic() + LIMIT_S, {}
    while len(found) < world_size - len(missing):
        assert time.monotonic() < end, f"only ranks {sorted(found)} have answered"
        with contextlib.suppress(queue.Empty):
            rank, good, answer = answers.get(timeout=0.2)
            assert good, f"rank {rank}:\n{answer}"
            found[rank] = answer
        dead = [
            rank
            for rank, process in enumerate(processes)
            if process.exitcode and rank not in found and rank not in missing
        ]
        assert not dead, f"ranks {dead} ended with {[processes[rank].exitcode for rank in dead]}"
    return [found.get(rank) for rank in range(world_size)]
