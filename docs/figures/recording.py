"""Records the terminal of `make demo` as a picture that moves: `python docs/figures/recording.py` writes demo.svg beside it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import tempfile
import termios
import time
from io import StringIO
from pathlib import Path
from select import select

import pyte
from rich.color import Color
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

ROOT = Path(__file__).parents[2]
COLUMNS, ROWS = 108, 28
COMMAND = "forgetfree run --config benchmarks/demo/demo.toml --jobs auto --out runs/demo"
#: Pictures that are shown, and seconds that one is shown, the last one longer.
FRAMES, SECONDS, LAST = 14, 0.9, 8.0
#: What rich fills for one frame; its own form loads a font from a server.
FRAME = """<g class="frame" id="{unique_id}"><style>{styles}</style>
<rect class="ground" width="{width}" height="{height}" rx="8"/>
<g transform="translate(12, 10)">{backgrounds}{matrix}</g></g>"""
#: The characters of a screen, each with its colour and whether it is bold.
Rows = list[list[tuple[str, str, bool]]]


def record(out: str) -> list[tuple[float, Rows]]:
    """Run the demo on a terminal, and return what stood there, whenever it had changed, with the seconds since the start."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        words = COMMAND.replace("forgetfree", f"{sys.executable} -m forgetfree").replace("runs/demo", out).split()
        os.execvpe(
            words[0], words, {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        )
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    stream.feed(f"$ {COMMAND}\r\n".encode())
    began, shown = time.monotonic(), [(0.0, rows_of(screen))]
    while True:
        if select([terminal], [], [], 0.2)[0]:
            try:
                stream.feed(os.read(terminal, 1 << 16).replace(out.encode(), b"runs/demo"))
            except OSError:  # the command has ended
                break
        if (rows := rows_of(screen)) != shown[-1][1]:
            shown.append((time.monotonic() - began, rows))
    if os.waitpid(child, 0)[1]:
        raise SystemExit("\n".join(screen.display))
    return [*shown, (time.monotonic() - began, rows_of(screen))]


def rows_of(screen: pyte.Screen) -> Rows:
    """The characters of a screen with colour and weight."""
    lines = ([screen.buffer[y][x] for x in range(COLUMNS)] for y in range(ROWS))
    return [[(cell.data, cell.fg, cell.bold) for cell in line] for line in lines]


def frame(rows: Rows, name: str) -> str:
    """One picture, drawn by rich."""
    console = Console(width=COLUMNS, record=True, file=StringIO(), force_terminal=True)
    for row in rows:
        length = max((i + 1 for i, cell in enumerate(row) if cell[0].strip()), default=0)
        cells = [Segment(text, Style(color=colour(shade), bold=bold)) for text, shade, bold in row[:length]]
        console.print(Segments([*Segment.simplify(cells), Segment.line()]), end="")
    drawn = console.export_svg(code_format=FRAME, unique_id=name)
    return re.sub(r' clip-path="[^"]*"|<text [^>]*>\s*</text>\n?', "", drawn)


def colour(name: str) -> Color | None:
    """Rich's colour for one of pyte's."""
    if name == "default":
        return None
    return Color.parse(f"#{name}" if re.fullmatch("[0-9a-f]{6}", name) else name.replace("brown", "yellow"))


def picture(shown: list[tuple[float, Rows]]) -> str:
    """All frames in one file. Each is seen for its time, and the last alone where nothing may move or be hidden."""
    end = shown[-1][0]
    times = [end * i / (FRAMES - 1) for i in range(FRAMES)]
    chosen = [[rows for seconds, rows in shown if seconds <= each][-1] for each in times]
    chosen = [rows for i, rows in enumerate(chosen) if i == 0 or rows != chosen[i - 1]]
    whole = SECONDS * (len(chosen) - 1) + LAST
    parts, rules = [], []
    for i, rows in enumerate(chosen):
        first, last = 100 * SECONDS * i / whole, 100 * SECONDS * (i + 1) / whole
        seen = f"{{opacity:{int(i == 0)}}}{first:.2f}%{{opacity:1}}" + (
            f"{last:.2f}%{{opacity:0}}" if i + 1 < len(chosen) else ""
        )
        rules.append(f"#f{i}{{animation:k{i} {whole:.1f}s step-end infinite}}@keyframes k{i}{{0%{seen}}}")
        parts.append(frame(rows, f"f{i}"))
    width, height = (
        float(each) for each in re.findall(r'class="ground" width="([\d.]+)" height="([\d.]+)"', parts[0])[0]
    )
    style = f".ground{{fill:#14171b}}text{{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:20px}}{''.join(rules)}"
    still = "@media (prefers-reduced-motion:reduce){.frame{animation:none!important}}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="make demo">'
    )
    return "\n".join([head, f"<style>{style}{still}</style>", *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        shown = record(f"{place}/demo")
    Path(__file__).with_name("demo.svg").write_text(picture(shown), encoding="utf-8")
