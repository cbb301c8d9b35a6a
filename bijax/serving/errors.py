"""Errors of the engine."""


class QueueFullError(RuntimeError):
    """The waiting queue is full: the request was not accepted. Try again later."""


class EngineError(RuntimeError):
    """The engine has stopped, by an error or because it was closed: it takes no requests."""
