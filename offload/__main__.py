"""``python -m offload`` is the command ``offload``."""

from .cli.main import app

app(prog_name="offload")
