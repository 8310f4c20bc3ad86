"""A thread that does jobs in order while training continues, and does not lose their errors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any


class WriterThread:
    """A queue of jobs and a thread that does them one after the other; it ends where `wait` finds none.

    The process does not end before all jobs are done. The first error is stored until `take_error`; jobs that were put
    with `needs_success` are left out after an error, until a job has succeeded again. `wait_for_place` waits until
    fewer than `max_jobs` are in progress or waiting.

    >>> done = []
    >>> writer = WriterThread(2)
    >>> for number in range(4):
    ...     writer.put(lambda number=number: done.append(number))
    >>> writer.wait(limit_s=5), done
    (True, [0, 1, 2, 3])
    """

    def __init__(self, max_jobs: int) -> None:
        self.max_jobs = max_jobs
        self._executor: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []
        self._error: BaseException | None = None
        self._has_failed = False

    def __reduce__(self) -> Any:
        # Strategies are pickled (spawn) before anything runs: there is no queue to take along, and a lock cannot be.
        return WriterThread, (self.max_jobs,)

    def put(self, job: Callable[[], None], *, needs_success: bool = False) -> None:
        """Put a job into the queue; with `needs_success` it is left out if the latest other one failed."""
        # Python waits for its thread at exit, so what was put is written.
        self._executor = self._executor or ThreadPoolExecutor(
            1, thread_name_prefix="checkpoint writer"
        )
        self._jobs.append(self._executor.submit(self._do, job, needs_success))

    def wait_for_place(self, *, limit_s: float) -> bool:
        """Wait until the queue has a place; return False if it has none by then."""
        too_many = self.num_jobs + 1 - self.max_jobs
        return not wait(self._jobs[: max(too_many, 0)], limit_s).not_done

    def wait(self, *, limit_s: float) -> bool:
        """Wait until all jobs are done; return False if they are not by then."""
        if wait(self._jobs, limit_s).not_done:
            return False
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
        return True

    @property
    def num_jobs(self) -> int:
        """Number of jobs in progress or waiting."""
        self._jobs = [job for job in self._jobs if not job.done()]
        return len(self._jobs)

    def take_error(self) -> BaseException | None:
        """Return the first error since the last call; None if there was none."""
        if (error := self._error) is not None:  # else the thread may note one meanwhile
            self._error = None
        return error

    def _do(self, job: Callable[[], None], needs_success: bool) -> None:
        # A removal (needs_success) neither counts as a failed write nor lifts one.
        if needs_success and self._has_failed:
            return
        try:
            job()
        except BaseException as error:
            self._error = self._error or error
            self._has_failed = self._has_failed or not needs_success
        else:
            self._has_failed = self._has_failed and needs_success
