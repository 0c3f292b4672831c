"""`python -m benchmarks.plot_peers RAW.json ... > plot.svg`: tokens/s beside other servers, as horizontal bars.

The raw figures are those of `benchmarks.peers_cpu` or `tgis bench`, in rounds; a bar is the median of the rounds.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

LOADS = {"1": "1 stream", "8": "8 streams", "32": "32 streams"}
SHOWN = {"tgis": "tgis", "tgis served": "tgis", "openvino": "OpenVINO GenAI", "vllm-tgis-adapter": "vLLM"}
COLORS = {"tgis": "#0b6a8a", "OpenVINO GenAI": "#c98a1b", "vLLM": "#8a8f94"}
WIDTH, LABEL, BAR, GAP = 400, 84, 18, 12


def medians(file: Path) -> dict[str, dict[str, float]]:
    """Tokens/s of each load and server."""
    rounds: list[dict[str, Any]] = json.loads(file.read_text())["rounds"]
    rates: dict[str, dict[str, list[float]]] = {load: {} for load in LOADS}
    for results in rounds:
        for name, result in results.items():
            for load, figures in result.get("loads", result).items():
                if name in SHOWN and load in LOADS:
                    rates[load].setdefault(SHOWN[name], []).append(figures["output_tokens_per_s"])
    return {load: {name: statistics.median(found) for name, found in peers.items()} for load, peers in rates.items()}


def panel(rates: dict[str, dict[str, float]], left: int) -> tuple[list[str], int]:
    """The bars of one comparison, and where they end."""
    unit = (WIDTH - LABEL - 130) / max(rate for peers in rates.values() for rate in peers.values())
    lines, y, start = [], 4, left + LABEL
    for load, peers in rates.items():
        lines.append(f'<text x="{start - 8}" y="{y + BAR + 6}" text-anchor="end">{LOADS[load]}</text>')
        for name, rate in sorted(peers.items(), key=lambda peer: peer[0] != "tgis"):
            lines += [
                f'<rect x="{start}" y="{y}" width="{rate * unit:.0f}" height="{BAR}" fill="{COLORS[name]}"/>',
                f'<text x="{start + rate * unit + 6:.0f}" y="{y + 14}">{rate:,.0f} {escape(name)}</text>',
            ]
            y += BAR + 3
        y += GAP
    return lines, y - GAP


def main(files: list[str]) -> None:
    panels = [panel(medians(Path(file)), WIDTH * position) for position, file in enumerate(files)]
    size = f"{WIDTH * len(files)} {max(end for _, end in panels)}"
    style = 'font-family="system-ui, sans-serif" font-size="13" fill="#57606a"'
    lines = [line for added, _ in panels for line in added]
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" {style}>', *lines, "</svg>", sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
