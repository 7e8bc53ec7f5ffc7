"""Memory now, as text on the node that runs."""

from __future__ import annotations

import logging

from comfy_execution.utils import get_executing_context
from server import PromptServer

from ..telemetry.report import report
from .free_flow import FreeFlow


def report_now(flow: FreeFlow) -> str:
    """The report of a snapshot that is taken now, and kept in the history; shown on the node, if one runs."""
    running = get_executing_context()
    node = "" if running is None else running.node_id
    text = report(flow.recorder.take("Memory Report", f"node {node}".strip(), level=logging.DEBUG))
    server = getattr(PromptServer, "instance", None)
    if server is not None and node:
        server.send_progress_text(text, node)
    return text
