"""Rewrites CUDA sources so that a C++ compiler takes them with the headers in `grid/`.

    python tests/cuda/simt/translate.py OUT FILE...

Every `asm` becomes a call of simt::ptx with its text and operands, every launch a call of
simt::Launch, shared memory that of the CTA's thread. FILEs keep their paths below OUT.
"""

import pathlib
import re
import sys

KINDS = {
    "=r": "out",
    "+r": "inout",
    "=l": "out",
    "=h": "out",
    "=f": "out",
    "+f": "inout",
    "f": "in",
    "r": "in",
    "l": "in",
    "n": "in",
    "h": "in",
}
# Kernels without barriers or warp operations: their threads run one after the other.
PLAIN = (
    "fill_hashed",
    "fill_fp8",
    "dequantize_planes",
    "requantize_rows",
    "oracle_inner",
    "oracle_hidden",
)


def end_of_parentheses(text: str, begin: int) -> int:
    """Where the parenthesis at `begin` closes, strings skipped."""
    depth, i = 0, begin
    while True:
        if text[i] == '"':
            i = next(j for j in range(i + 1, len(text)) if text[j] == '"' and text[j - 1] != "\\")
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
        i += 1


def split_top(text: str, separator: str) -> list[str]:
    """Splits where the separator stands outside strings and parentheses."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        if text[i] == '"':
            i = next(j for j in range(i + 1, len(text)) if text[j] == '"' and text[j - 1] != "\\")
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0 and text[i] == separator:
            parts.append(text[start:i])
            start = i + 1
        i += 1
    return [*parts, text[start:]]


def translate_asm(inside: str) -> str:
    sections = split_top(inside, ":")
    if sections[0].strip() == '""':
        return "void()"  # for the compiler alone
    operands = []
    for section in sections[1:3]:
        for operand in split_top(section, ","):
            match = re.fullmatch(r'\s*"([^"]*)"\s*\((.*)\)\s*', operand, re.DOTALL)
            if match:
                operands.append(f"simt::{KINDS[match[1]]}({match[2]})")
    return f"simt::ptx({sections[0].strip()}, {{{', '.join(operands)}}})"


def translate(text: str) -> str:
    text = re.sub(r"(//[^\n]*)", lambda m: m[0].replace('"', "'"), text)
    at = 0
    while (found := re.compile(r"\basm(?: volatile)?\(").search(text, at)) is not None:
        end = end_of_parentheses(text, found.end() - 1)
        call = translate_asm(text[found.end() : end])
        text = text[: found.start()] + call + text[end + 1 :]
        at = found.start() + len(call)
    text = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?uint8_t (\w+)\[\];",
        r"uint8_t* const \1 = simt::dynamic_shared();",
        text,
    )
    text = re.sub(r"__shared__ alignas\(\d+\)", "static thread_local", text)
    text = re.sub(r"__shared__ (?=\w)", "static thread_local ", text)

    def launch(match: re.Match) -> str:
        how = "run_plain" if match[1].startswith(PLAIN) else "run"
        return f"simt::Launch({match[2]}).{how}([](const auto&... a) {{ {match[1]}(a...); }}, "

    return re.sub(r"([\w:]+(?:<[\w:, ]+>)?)<<<(.*?)>>>\(\s*", launch, text, flags=re.DOTALL)


def main() -> None:
    out, root = pathlib.Path(sys.argv[1]), pathlib.Path.cwd()
    for name in sys.argv[2:]:
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(translate((root / name).read_text()))


if __name__ == "__main__":
    main()
