"""TLS of the command: options in front of all subcommands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvloop.tls import ClientTlsFiles


def tls_options(
    context: typer.Context,
    tls: Annotated[
        bool,
        typer.Option(
            "--tls", envvar="KVLOOP_TLS", help="Speak TLS, and trust gRPC's own authorities."
        ),
    ] = False,
    tls_ca_file: Annotated[
        Path | None,
        typer.Option(
            envvar="KVLOOP_TLS_CA_FILE",
            help="Speak TLS, and trust the authorities in this PEM file.",
        ),
    ] = None,
    tls_certificate_file: Annotated[
        Path | None,
        typer.Option(
            envvar="KVLOOP_TLS_CERTIFICATE_FILE",
            help="PEM file with the certificate to show, for mutual TLS.",
        ),
    ] = None,
    tls_key_file: Annotated[
        Path | None,
        typer.Option(envvar="KVLOOP_TLS_KEY_FILE", help="PEM file with its private key."),
    ] = None,
    tls_server_name: Annotated[
        str,
        typer.Option(
            envvar="KVLOOP_TLS_SERVER_NAME",
            help="Name that the service's certificate must carry.",
            show_default="the host that is called",
        ),
    ] = "",
) -> None:
    """Keep the options for the subcommand, which gets them by `tls_of`."""
    files = (tls_ca_file, tls_certificate_file, tls_key_file)
    if not tls and files == (None, None, None):
        return
    try:
        context.obj = ClientTlsFiles(
            ca_file=tls_ca_file,
            certificate_file=tls_certificate_file,
            key_file=tls_key_file,
            server_name=tls_server_name,
        )
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"TLS: {error}") from error


def tls_of(context: typer.Context) -> ClientTlsFiles | None:
    """How the subcommand shall speak TLS; None: in plain text."""
    found = context.obj
    return found if isinstance(found, ClientTlsFiles) else None
