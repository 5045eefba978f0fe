"""``forgetfree serve``: serve the predictions of a finished run over HTTP."""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from forgetfree.cli.arguments import BaseModel, Debug, Deterministic, Device, Run, Seed, Strategy, predictor_of
from forgetfree.errors import UsageError, first_line


def command(
    run: Run,
    /,
    *,
    host: Annotated[
        str, Parameter(metavar="NAME", help="address to listen on; 0.0.0.0: also accept other machines")
    ] = ("127.0.0.1"),
    port: Annotated[
        int, Parameter(metavar="N", validator=Number(gte=0, lt=2**16), help="port to listen on; 0: any free port")
    ] = 8000,
    allow_host: Annotated[
        tuple[str, ...],
        Parameter(metavar="NAME", help="further host name or address that requests may use, besides --host; *: any"),
    ] = (),
    allow_origin: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="ORIGIN",
            help="origin of web pages that may send requests, such as https://my.site; can be repeated",
        ),
    ] = (),
    most_tokens: Annotated[
        int,
        Parameter(
            metavar="N", validator=Number(gte=1), help="largest number of tokens that a client may request in a chat"
        ),
    ] = 1024,
    seed: Seed = None,
    strategy: Strategy = None,
    model: BaseModel = None,
    device: Device = "auto",
    deterministic: Deterministic = False,
    debug: Debug = False,
) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    try:
        import uvicorn

        from forgetfree.serve.server import application
    except ImportError as error:
        raise UsageError(
            f"forgetfree serve needs FastAPI and uvicorn, but {error.name} is not installed. Install them with: pip "
            "install 'forgetfree[serve]'."
        ) from error
    for origin in allow_origin:
        if not re.fullmatch(r"https?://[^\s/?#@,*]+", origin):
            raise UsageError(
                f"--allow-origin must be an origin such as https://my.site or http://my.site:8080, got {origin!r}."
            )
    shown = f"[{host}]" if ":" in host else host
    try:
        place = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UsageError(
            f"The server cannot listen on {host}, port {port}: {first_line(error)}. Choose another --port, or 0 for "
            "any free port; --host must be an address of this machine."
        ) from error
    with place:
        predictor, source = predictor_of(run, seed, strategy, model, device, deterministic)
        hosts = {"localhost", "127.0.0.1", "[::1]", shown, socket.gethostname(), *allow_host}
        app = application(predictor, hosts=hosts, origins=allow_origin, most_tokens=most_tokens)
        config = uvicorn.Config(app, log_level="warning", limit_concurrency=256, timeout_graceful_shutdown=10)
        address = f"http://{shown}:{place.getsockname()[1]}"
        print(
            f"Serving {', '.join(predictor.tasks)} from {source.file} on {address}; documentation: {address}/docs",
            flush=True,
        )
        with suppress(KeyboardInterrupt):  # uvicorn re-raises the signal that ended it
            uvicorn.Server(config).run(sockets=[place])
