"""One lock for decoders that are made while threads run.

msgspec keeps what it knows of a type at the type, and puts it there before it is complete: another thread that decodes
with it meanwhile reads a null pointer. Decoders that a module makes as it is imported need no lock.
"""

from __future__ import annotations

import threading
from typing import Final

TYPE_LOCK: Final = threading.Lock()
"""Held while a decoder is made, or something is converted to a type of which there may be none yet."""
