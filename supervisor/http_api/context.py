"""What every endpoint is given. It holds things and does nothing."""

from __future__ import annotations

from dataclasses import dataclass

from infervisor.supervisor.http_api.ledger import Ledger
from infervisor.supervisor.http_api.models import Models
from infervisor.supervisor.http_api.settings import HttpSettings


@dataclass(frozen=True, slots=True)
class Context:
    """The models, the requests, and the settings of one application."""

    models: Models
    ledger: Ledger
    settings: HttpSettings
