"""Tables and paragraphs of plain text."""

import pytest

from project.report.table import Column, head_line, paragraph, print_table, row_line, table_lines

COLUMNS = (Column("name", width=6), Column("s", right=True, width=4), Column())


def test_a_column_is_as_wide_as_its_widest_cell() -> None:
    rows = [("a", "1.5", "x"), ("longer name", "12,000", "")]
    assert table_lines((Column("name"), Column("s", right=True), Column("more")), rows) == [
        "name              s  more",
        "a               1.5  x",
        "longer name  12,000",
    ]


def test_a_notebook_gets_lines_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)  # rich's own question, which has no public name
    assert table_lines((Column("name"),), [("a",)]) == ["name", "a"]
    assert capsys.readouterr().out == ""


def test_rows_that_come_one_by_one_stand_below_one_another() -> None:
    assert head_line(COLUMNS) == "name       s"
    assert row_line(COLUMNS, ("a", "12", "detail")) == "a         12  detail"
    assert row_line(COLUMNS, ("a", "12", "detail"), gap=1) == "a        12 detail"
    assert row_line(COLUMNS, ("too long", "12", "x" * 20_000)) == f"too long    12  {'x' * 20_000}"  # nothing is cut off


def test_a_pipe_gets_ascii_without_colours_and_cells_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "10")
    name = "photos/[red]a[/red] :smile: of a long name.jpg"
    print_table((Column("image"), Column("probability", right=True)), [(name, "5.00%")])
    assert capsys.readouterr().out == f"image{' ' * (len(name) - 5)}  probability\n{name}        5.00%\n"


def test_a_paragraph_keeps_names_whole() -> None:
    assert paragraph("see --data.global_batch_size and more", width=12, more="  ") == [
        "see",
        "  --data.global_batch_size",
        "  and more",
    ]
