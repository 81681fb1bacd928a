"""Command line; see kvloop --help."""


def main() -> None: ...
