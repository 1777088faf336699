"""The screen of `trimesh top`, by textual.

TP-1 A thread polls the run, one query at a time: a run that does not answer delays no key press.
TP-2 The selected row stays selected when it moves.
TP-3 A reply may arrive at any moment. Before a screen has its widgets, it waits for them; after all screens are closed,
     it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from trimesh import limits
from trimesh.cli.text import one_line
from trimesh.cli.top import COLUMNS, cells, chosen, detail, summary
from trimesh.errors import ConnectError
from trimesh.observe import ProcActivity, RunSnapshot, activity_between, calls_of


class DetailScreen(ModalScreen[None]):
    """Current details of one process."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q", "dismiss", "back")]
    CSS = (
        "DetailScreen { align: center middle; } DetailScreen VerticalScroll { width: 90%; height: 80%; border: solid; }"
    )

    def __init__(self, proc_id: str) -> None:
        super().__init__()
        self.proc_id = proc_id
        self._text = Text()

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(self._text, id="detail")

    def show(self, text: Text) -> None:
        """Show a text, now or as soon as the screen has its parts (TP-3)."""
        self._text = text
        for part in self.query("#detail").results(Static):
            part.update(text)


class TopApp(App[None]):
    """Live table of the processes of a run.

    Args:
        ask: Returns a snapshot of the run; may block.
        every: Polling interval in seconds.
        column, is_reversed: See below.

    Attributes:
        shown: Rows in display order.
        column: Column by which they are sorted.
        is_reversed: Whether the least urgent rows come first.
    """

    TITLE = "trimesh top"
    CSS = "#summary { height: auto; padding: 0 1; } #filter { display: none; } #filter.open { display: block; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("s", "sort(1)", "next column"),
        Binding("S", "sort(-1)", "column before"),
        Binding("r", "reverse", "reverse"),
        Binding("slash", "filter", "filter"),
        Binding("escape", "clear", "show all", show=False),
    ]

    def __init__(
        self, ask: Callable[[], RunSnapshot], every: float, *, column: int = 0, is_reversed: bool = False
    ) -> None:
        super().__init__()
        self.shown: list[ProcActivity] = []
        self.column = column
        self.is_reversed = is_reversed
        self._ask = ask
        self._every = every
        self._seen: RunSnapshot | None = None
        self._rows: list[ProcActivity] = []
        self._is_asking = False

    def compose(self) -> ComposeResult:
        yield Static("querying the run ...", id="summary")
        yield Input(placeholder="part of a name, a host or a state", id="filter")
        yield DataTable[Text](cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Start polling the run."""
        self._name_columns()
        self.table.focus()
        self.set_interval(self._every, self.look)
        self.look()

    @property
    def table(self) -> DataTable[Text]:
        """The table of processes."""
        return cast("DataTable[Text]", self.query_one(DataTable))

    # ---- the run ---------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Query the run, unless a query is pending."""
        if not self._is_asking:
            self._is_asking = True
            self._look()

    @work(thread=True)
    def _look(self) -> None:
        try:
            seen = self._ask()
        except ConnectError as error:
            self.call_from_thread(self.lost, str(error))
        else:
            self.call_from_thread(self.saw, seen)

    def saw(self, seen: RunSnapshot) -> None:
        """Show a new snapshot of the run."""
        self._is_asking = False
        self._rows = activity_between(seen, self._seen)
        self._seen = seen
        self.arrange()

    def lost(self, words: str) -> None:
        """Show that the run has ended or does not answer; the last rows stay."""
        self._is_asking = False
        if self.is_running:  # TP-3
            self.query_one("#summary", Static).update(Text(one_line(words), style="red"))

    # ---- rows ------------------------------------------------------------------------------------------------

    def _name_columns(self) -> None:
        self.table.clear(columns=True)
        for number, name in enumerate(COLUMNS):
            self.table.add_column(f"{name} {'▲' if self.is_reversed else '▼'}" if number == self.column else name)

    def arrange(self) -> None:
        """Show the filtered rows, sorted."""
        if not self.is_running:
            return  # TP-3
        table, current = self.table, self.current
        wanted = chosen(self._rows, self.column, self.query_one("#filter", Input).value, is_reversed=self.is_reversed)
        self.shown = wanted[: limits.TOP_ROWS_MAX]
        if self._seen is not None:
            self.query_one("#summary", Static).update(summary(self._seen, left_out=len(wanted) - len(self.shown)))
        table.clear()
        for one in self.shown:
            table.add_row(*cells(one), key=one.proc.id)
        for number, one in enumerate(self.shown):
            if one.proc.id == current:
                table.move_cursor(row=number)
        if isinstance(self.screen, DetailScreen):
            self._show_detail(self.screen)

    @property
    def current(self) -> str:
        """Id of the process in the selected row; "" for none."""
        row = self.table.cursor_row
        keys = [str(key.value) for key in self.table.rows]
        return keys[row] if 0 <= row < len(keys) else ""

    # ---- keys ------------------------------------------------------------------------------------------------

    def action_sort(self, step: int) -> None:
        """Sort by a column that is `step` columns further right."""
        self.column = (self.column + step) % len(COLUMNS)
        self._sort()

    def action_reverse(self) -> None:
        """Sort in the other direction."""
        self.is_reversed = not self.is_reversed
        self._sort()

    @on(DataTable.HeaderSelected)
    def _head_clicked(self, event: Any) -> None:
        """Sort by the column whose head was clicked; a second click reverses."""
        self.is_reversed = event.column_index == self.column and not self.is_reversed
        self.column = event.column_index
        self._sort()

    def _sort(self) -> None:
        current = self.current
        self._name_columns()
        self.arrange()
        for number, one in enumerate(self.shown):
            if one.proc.id == current:
                self.table.move_cursor(row=number)

    def action_filter(self) -> None:
        """Open the filter."""
        box = self.query_one("#filter", Input)
        box.add_class("open")
        box.focus()

    def action_clear(self) -> None:
        """Show all rows again."""
        box = self.query_one("#filter", Input)
        box.value = ""
        box.remove_class("open")
        self.table.focus()
        self.arrange()

    @on(Input.Changed)
    def _filter_changed(self) -> None:
        self.arrange()

    @on(Input.Submitted)
    def _filter_entered(self) -> None:
        self.table.focus()

    @on(DataTable.RowSelected)
    def _row_entered(self, event: Any) -> None:
        screen = DetailScreen(str(event.row_key.value))
        self._show_detail(screen)
        self.push_screen(screen)

    def _show_detail(self, screen: DetailScreen) -> None:
        found = next((one for one in self._rows if one.proc.id == screen.proc_id), None)
        if found is None or self._seen is None:
            screen.show(Text("this process is gone"))
        else:
            screen.show(detail(found, calls_of(self._seen, screen.proc_id)))
