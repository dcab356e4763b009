"""Ctrl-C and SIGTERM: what a run finishes before it saves and leaves."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import distributed
from config import Config
from run.state import State

NOTE = {
    signal.SIGINT: b"\nstopping after this step (Ctrl-C again to stop at once, losing it)\n",
    signal.SIGTERM: b"\nSIGTERM: saving, then leaving\n",
}


@contextmanager
def handle_signals(state: State, config: Config) -> Iterator[None]:
    """Ctrl-C finishes the current step and saves; a second one ends at once. SIGTERM, from a
    scheduler that wants the machine back, stops sampling and saves the last finished step, or
    finishes an update that has begun (with --async-steps also the rollout that runs during it,
    which would be lost otherwise).
    """

    def handler(number: int, frame: FrameType | None) -> None:
        if state.stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        state.stop = True
        if number == signal.SIGTERM and not config.async_steps:
            state.sampler.interrupted = True
        if distributed.rank() == 0:
            with suppress(OSError):  # the terminal may be gone
                # Not print: a handler that interrupts a print would raise in the middle of it.
                os.write(2, NOTE[number])

    previous = {number: signal.signal(number, handler) for number in NOTE}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
