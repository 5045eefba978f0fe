"""``forgetfree serve``: answer over HTTP from a finished run."""

from __future__ import annotations

import os
import re
import socket
from contextlib import ExitStack, suppress
from functools import partial
from typing import Annotated, Any

from cyclopts import Parameter

from forgetfree.cli.usage import Debug
from forgetfree.cli.use import BaseModel, Deterministic, Device, Run, Seed, Strategy, predictor_of
from forgetfree.errors import UsageError, first_line
from forgetfree.jobs.running.environment import set_threads


def command(
    run: Run,
    /,
    *,
    host: Annotated[str, Parameter(metavar="NAME", help="address to listen on; 0.0.0.0: from other machines, too")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, Parameter(metavar="N", help="port to listen on; 0: a free one")] = 8000,
    most_texts: Annotated[int | None, Parameter(metavar="N", help="texts of a request (default: 256)")] = None,
    most_characters: Annotated[int | None, Parameter(metavar="N", help="of a text (default: 20000)")] = None,
    most_tokens: Annotated[
        int | None, Parameter(metavar="N", help="of a text that a chat asks for (default: 1024)")
    ] = None,
    most_beams: Annotated[
        int | None, Parameter(metavar="N", help="that a chat is searched with (default: 4, or as in the run)")
    ] = None,
    most_waiting: Annotated[int | None, Parameter(metavar="N", help="texts that wait (default: 2048)")] = None,
    most_bytes: Annotated[int | None, Parameter(metavar="N", help="of a request (default: 1048576)")] = None,
    allow_origin: Annotated[
        tuple[str, ...],
        Parameter(metavar="ORIGIN", help="pages that may ask, such as https://my.site; give it once for each"),
    ] = (),
    threads: Annotated[int | None, Parameter(metavar="N", help="CPU threads (default: as torch chooses)")] = None,
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

        from forgetfree.serve.batcher import Limits
        from forgetfree.serve.server import TimelyProtocol, application
    except ImportError as error:
        raise UsageError(
            f"forgetfree serve needs FastAPI and uvicorn, and {error.name} is not installed. Install them with: pip install "
            "'forgetfree[serve]'."
        ) from error
    numbers = {}
    for flag, name, value in (
        ("--most-texts", "texts", most_texts),
        ("--most-characters", "characters", most_characters),
        ("--most-tokens", "tokens", most_tokens),
        ("--most-beams", "beams", most_beams),
        ("--most-waiting", "queue", most_waiting),
        ("--most-bytes", "body", most_bytes),
    ):
        if value is not None and value < 1:
            raise UsageError(f"{flag} must be at least 1, got {value}.")
        if value is not None:
            numbers[name] = value
    for origin in allow_origin:
        if not re.fullmatch(r"https?://[^\s/?#@,*]+", origin):
            raise UsageError(f"--allow-origin must be such as https://my.site or http://my.site:8080, got {origin!r}.")
    limits = Limits(**numbers)
    cores = os.cpu_count() or 1
    if threads is not None and not 1 <= threads <= cores:
        raise UsageError(f"--threads must be from 1 to {cores}, the CPU cores of this machine, got {threads}.")
    with _listening(host, port) as place:
        set_threads(threads)
        predictor, source = predictor_of(run, seed, strategy, model, device, deterministic)
        app = application(
            predictor,
            limits,
            hosts={"localhost", host, socket.gethostname(), socket.getfqdn()},
            origins=allow_origin,
            ending=lambda: server.should_exit,
        )
        protocol: Any = partial(TimelyProtocol, seconds=limits.seconds)
        server = uvicorn.Server(uvicorn.Config(app, http=protocol, log_level="warning", timeout_graceful_shutdown=10))
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{place.getsockname()[1]}"
        place.listen(2048)  # from now on requests wait for the server and are not refused
        print(
            f"Serving {', '.join(predictor.tasks)} from {source.file} on {address}; documentation: {address}/docs",
            flush=True,
        )
        with suppress(KeyboardInterrupt):  # uvicorn hands on the signal that it was ended by
            server.run(sockets=[place])


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that is bound, but does not listen yet.

    Raises:
        UsageError: there is no such address, or the port is taken.
    """
    if not 0 <= port < 2**16:
        raise UsageError(f"--port must be a number from 0 to 65535, got {port}.")
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as on_error:
            place = on_error.enter_context(socket.socket(kind))
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            place.bind(address)
            on_error.pop_all()
    except OSError as error:
        raise UsageError(
            f"The server cannot listen on {host}, port {port}: {first_line(error)}. Give another --port, or 0 for a free one; "
            "--host must be an address of this machine."
        ) from error
    return place
