"""Background thread that runs queued jobs in order and stores their first error."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any


class WriterThread:
    """Job queue with one background thread that runs the jobs in order.

    The thread ends when `wait` finds that all jobs are done. The process does not exit before all jobs are done. The
    first error is stored until `take_error` is called.

    Args:
        max_jobs: Maximum number of running and waiting jobs that take a slot. `wait_for_slot` waits until there are
            fewer.

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
        self._jobs_in_slots: list[Future[None]] = []
        self._error: BaseException | None = None

    def __reduce__(self) -> Any:
        # Locks cannot be pickled. Strategies are pickled (spawn) before any job runs, so the queue is empty.
        return WriterThread, (self.max_jobs,)

    def put(self, job: Callable[[], None], *, takes_slot: bool = True) -> None:
        """Append a job to the queue.

        A job that holds no memory, such as a removal, needs no slot.
        """
        if self._executor is None:
            # Python waits for this thread at exit, so all jobs of the queue run.
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint writer")
        future = self._executor.submit(self._run, job)
        self._jobs.append(future)
        if takes_slot:
            self._jobs_in_slots.append(future)

    def wait_for_slot(self, *, limit_s: float) -> bool:
        """Wait until the queue has room for another job, or return False when the time limit expires."""
        num_to_finish = max(self.num_in_slots + 1 - self.max_jobs, 0)
        return not wait(self._jobs_in_slots[:num_to_finish], limit_s).not_done

    def wait(self, *, limit_s: float) -> bool:
        """Wait until all jobs are done, or return False when the time limit expires."""
        if wait(self._jobs, limit_s).not_done:
            return False
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
        return True

    @property
    def num_jobs(self) -> int:
        """Number of jobs that are running or waiting in the queue."""
        self._jobs = [job for job in self._jobs if not job.done()]
        return len(self._jobs)

    @property
    def num_in_slots(self) -> int:
        """Number of running and waiting jobs that take a slot."""
        self._jobs_in_slots = [job for job in self._jobs_in_slots if not job.done()]
        return len(self._jobs_in_slots)

    def take_error(self) -> BaseException | None:
        """Return and clear the stored error, or return None if no job has failed."""
        error = self._error
        # Otherwise, an error that the thread stores in the meantime would be lost.
        if error is not None:
            self._error = None
        return error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            if self._error is None:
                self._error = error
