"""How wide a table is when nothing of it is cut."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDEST = 100_000


def natural_width(table: Table, console: Console) -> int:
    """Columns of text that ``table`` takes, however many the console has."""
    return Measurement.get(console, console.options.update(width=WIDEST), table).maximum
