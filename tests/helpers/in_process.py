"""What benchmarks do in processes of their own, done in this one."""

from __future__ import annotations

from workers import WorkerError, in_words


class InProcess:
    """As `workers.Worker`, but the object lives here; figures that need a process of their own mean nothing."""

    def __init__(self, make, *arguments):
        self.make, self.arguments, self.found = make, arguments, None

    def ask(self, name, *arguments):
        try:
            self.found = self.found or self.make(*self.arguments)
            return getattr(self.found, name)(*arguments)
        except Exception as error:
            raise WorkerError(*in_words(error)) from error

    def close(self):
        if hasattr(self.found, "close"):
            self.found.close()

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.close()
