"""The configuration: DeepSpeed's JSON, read as it is, and a few settings of ours in the same places.

    config = OffloadConfig.from_any("config.json")     # or a dict, JSON text, or a configuration
    config.zero_optimization.offload_param.device      # attributes are named as the keys are

The rules, the same for every setting:

* Text may hold ``#``, ``//`` and ``/* */`` comments and trailing commas; a key given twice is refused.
* Numbers may be written ``1e9``, ``1000000000.0`` or ``"1e9"``. Fractions are refused for counts and rounded
  down for sizes; booleans, infinities and unfilled shell variables are refused; more than 64 bits means
  "all".
* ``null`` is as good as absent. ``"auto"`` means the default, except where a setting has an automatic value
  of its own (``memory``, ``aio``, ``device``, ``update``, ``generations``, ``enabled``).
* Known to be the same thing (older spellings, ``true`` for a block, ``aio`` inside ``zero_optimization``,
  class names as optimizer types): mapped, with a note. The old and the new form together are refused if they
  differ.
* DeepSpeed's sizes of its own buffers: kept as hints, with a note; the memory plan decides.
* DeepSpeed's settings that cannot change what is learned and mean nothing here: no effect, with a note.
* DeepSpeed's settings that would change what is learned and are not done here: refused while they are on.
* Anything else (misspelt, in another block, a launcher's setting): refused, with the nearest match or right
  place.

All problems come in one :class:`~offload.errors.ConfigError`, ``path: what is wrong; what to do`` on a line
each; notes are in ``config.notes``. Paths on disk are not looked at here. No default of DeepSpeed's is taken
that changes gradients: clipping is off unless ``gradient_clipping`` is written.
"""

from .config import OffloadConfig
from .resolve import BatchSizes

__all__ = ["BatchSizes", "OffloadConfig"]
