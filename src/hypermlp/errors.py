"""Errors that are neither bad values nor defects."""

from __future__ import annotations


class RunError(RuntimeError):
    """Work that cannot continue, for a reason and with a remedy that the message states.

    A wrong value is a `ValueError`, a file that cannot be read or written an `OSError`; a bare `RuntimeError` is a defect.
    """
