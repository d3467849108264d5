"""Records a command as it looks on a terminal, and writes the recording as one animated SVG.

    python docs/pictures/record.py docs/pictures/demo.svg make demo

The command runs in tmux, which is the terminal: what it shows is what a person sees, colours
included. The SVG plays some of these screens faster than they came, then shows the last one for a
while, which is also all that a viewer without animation shows. Needs tmux, and rich.
"""

from __future__ import annotations

import argparse
import io
import re
import shlex
import subprocess
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 100, 32
POLL_S = 0.2
PROMPT = "$ "
SOCKET = "kvtide-record"
SHOWN_FRAMES = 40
FRAME_S, LAST_FRAME_S = 0.4, 8.0
# What rich makes of a line, without a window around it.
LINE = "<style>{styles}</style>{backgrounds}{matrix}"
SIZE = "{width} {height}"
WINDOW = """<svg viewBox="0 0 SIZE" xmlns="http://www.w3.org/2000/svg">
<style>
text {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: {char_height}px }}
.frame {{ visibility: hidden }}
.frame:last-child {{ visibility: visible }}
@media (prefers-reduced-motion: no-preference) {{
ANIMATIONS
}}
</style>
{chrome}
<defs>
LINES
</defs>
<g transform="translate({terminal_x}, {terminal_y})">
FRAMES
</g>
</svg>
"""


def tmux(*arguments: str) -> str:
    """What tmux prints. The server is this script's own."""
    command = ["tmux", "-u", "-L", SOCKET, *arguments]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout


def record(command: str) -> list[str]:
    """The screens that follow each other while `command` runs in a shell, as text with colours."""
    size = ("-x", str(COLUMNS), "-y", str(ROWS))
    tmux("-f", "/dev/null", "new-session", "-d", *size, f"env PS1='{PROMPT}' LANG=C.UTF-8 sh")
    try:
        tmux("set-option", "status", "off")
        tmux("resize-window", *size)
        tmux("send-keys", command, "Enter")
        screens: list[str] = []
        while not screens or not is_over(screens[-1]):
            time.sleep(POLL_S)
            screen = tmux("capture-pane", "-e", "-p")
            if screen not in screens[-1:]:
                screens.append(screen)
        return screens
    finally:
        tmux("kill-server")


def is_over(screen: str) -> bool:
    """Whether the shell asks for another command."""
    lines = Text.from_ansi(screen).plain.rstrip().splitlines()
    return len(lines) > 1 and lines[-1] == PROMPT.strip()


def chosen(screens: list[str]) -> list[str]:
    """The first screen, the last one, and as many in between as are shown, evenly spaced."""
    count = min(SHOWN_FRAMES, len(screens))
    return [screens[number * (len(screens) - 1) // max(1, count - 1)] for number in range(count)]


def drawn(lines: list[str], code_format: str, *, unique_id: str = "", title: str = "") -> str:
    """Lines of the terminal as rich draws them."""
    console = Console(record=True, file=io.StringIO(), width=COLUMNS, color_system="256")
    for line in lines:
        console.print(Text.from_ansi(line), no_wrap=True, overflow="crop")
    svg = console.export_svg(code_format=code_format, unique_id=unique_id or "window", title=title)
    return re.sub(r' clip-path="[^"]*"', "", svg)


def animations(count: int) -> str:
    """The CSS by which each of `count` frames is visible in its time."""
    total_s = (count - 1) * FRAME_S + LAST_FRAME_S
    rules: list[str] = []
    for number in range(count):
        first = 100 * number * FRAME_S / total_s
        after = 100 * (number + 1) * FRAME_S / total_s if number < count - 1 else 100
        rules.append(
            f"@keyframes k{number} {{ 0% {{ visibility: hidden }} "
            f"{first:.2f}% {{ visibility: visible }} {after:.2f}% {{ visibility: hidden }} }} "
            f"#f{number} {{ animation: k{number} {total_s:.1f}s step-end infinite }}"
        )
    return "\n".join(rules)


def picture(screens: list[str], title: str) -> str:
    """The animated SVG of these screens. A line that several screens have is drawn once."""
    line_height = float(drawn([""], "{line_height}"))
    numbers: dict[str, int] = {}
    frames = []
    for number, screen in enumerate(screens):
        uses = [
            f'<use href="#l{numbers.setdefault(line, len(numbers))}" y="{row * line_height:.1f}"/>'
            for row, line in enumerate(screen.splitlines())
            if line
        ]
        frames.append(f'<g class="frame" id="f{number}">{"".join(uses)}</g>')
    lines = [
        f'<g id="l{number}">{drawn([line], LINE, unique_id=f"s{number}")}</g>'
        for line, number in numbers.items()
    ]
    parts = {
        "SIZE": drawn([""] * ROWS, SIZE),
        "ANIMATIONS": animations(len(screens)),
        "LINES": "\n".join(lines),
        "FRAMES": "\n".join(frames),
    }
    window = drawn([""] * ROWS, WINDOW, title=title)
    return re.sub("|".join(parts), lambda found: parts[found[0]], window)


def main() -> None:
    """Records, and writes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("svg", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = shlex.join(arguments.command)
    screens = chosen(record(command))
    arguments.svg.write_text(picture(screens, command), encoding="utf-8")


if __name__ == "__main__":
    main()
