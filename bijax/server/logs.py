"""Log lines, as text or as JSON."""

import json
import logging
import sys
import time

_KNOWN = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "asctime", "color_message"}


class JsonFormatter(logging.Formatter):
    """One JSON object in each line: time, level, logger, message, and the record's extra fields.

    Example:
        >>> record = logging.LogRecord("bijax", logging.INFO, "", 0, "GET %s", ("/",), None)
        >>> record.created, record.status = 0.25, 200
        >>> JsonFormatter().format(record)
        '{"time": "1970-01-01T00:00:00.250Z", "level": "INFO", "logger": "bijax", "message": "GET /", "status": 200}'
    """

    def format(self, record: logging.LogRecord) -> str:
        """Writes a record."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.created % 1 * 1000):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        } | {name: value for name, value in record.__dict__.items() if name not in _KNOWN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Time, level and message; for a request also its duration and id.

    Example:
        >>> record = logging.LogRecord("bijax", logging.INFO, "", 0, "GET %s", ("/",), None)
        >>> record.duration_s, record.request_id = 0.25, "mine"
        >>> TextFormatter().format(record).partition("INFO ")[2]
        'GET / 0.250 s [mine]'
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Writes a record."""
        request_id, seconds = (getattr(record, name, None) for name in ("request_id", "duration_s"))
        took = "" if seconds is None else f" {seconds:.3f} s"
        return super().format(record) + took + ("" if request_id is None else f" [{request_id}]")


def set_up_logs(log_format: str) -> None:
    """Lets the server's loggers write to stderr. Only the command does so: an application has its own logs.

    Args:
        log_format: "text" or "json".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    for name in ("bijax.server", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    logging.getLogger("bijax.server").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
