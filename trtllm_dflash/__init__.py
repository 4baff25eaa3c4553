"""DFlash speculative-decoding drafters: engine builder, runtime, reference. The public names are those listed here."""

from __future__ import annotations

__version__ = "0.1.0"
