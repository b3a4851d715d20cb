"""The command line: `ditpar generate`, `show`, `trace`, `doctor`, `selftest`, `conform`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

# Said once by the libraries at each import, and of no use to someone who types a command.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

import typer

from ditpar.app import exits

app = typer.Typer(
    name="ditpar",
    help="Parallel inference for diffusion transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def _version(wanted: bool) -> None:
    if wanted:
        import ditpar

        print(ditpar.__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to draw. May be left out with --from.")] = None,
    model: Annotated[str | None, typer.Option(help="Model folder or hub id; the bundled model without it.")] = None,
    plan: Annotated[str | None, typer.Option(help="For example cfg=2,ulysses=2; or auto.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Number of ranks; must agree with --plan.")] = None,
    size: Annotated[
        str | None, typer.Option(metavar="WxH", help="Width and height in pixels, for example 256x256.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option(help="guidance_scale of the pipeline.")] = None,
    true_cfg: Annotated[float | None, typer.Option(help="true_cfg_scale of the pipeline.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A further argument of the pipeline; may be repeated."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the first image; the next ones count up. Random without it.")
    ] = None,
    count: Annotated[int, typer.Option(help="How many images.")] = 1,
    negative: Annotated[str | None, typer.Option(help="What not to draw.")] = None,
    out: Annotated[Path | None, typer.Option(help="A .png file, or a folder.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE.png", help="Repeat the image in this file.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write what each rank did when, for trace viewers.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Generate images. Progress goes to stderr, the files' paths to stdout."""
    from ditpar.gang.server import drop_spare, prestart

    prestart()  # it imports the heavy libraries while this process does too
    from ditpar.app.generate import Options, run

    given = Options(
        prompt,
        model,
        plan,
        ranks,
        size,
        steps,
        guidance,
        true_cfg,
        settings or [],
        seed,
        count,
        negative,
        out,
        source,
        trace,
    )
    try:
        run(given, as_json)
    finally:
        drop_spare()


@app.command()
def show(file: Annotated[Path, typer.Argument(help="A PNG made by ditpar.")], as_json: AsJson = False) -> None:
    """Show how an image was made."""
    from ditpar.app.show import run

    run(file, as_json)


@app.command()
def trace(file: Annotated[Path, typer.Argument(help="A trace of the ranks, JSON.")], as_json: AsJson = False) -> None:
    """Show what each rank spent its time on: computing, waiting, nothing."""
    from ditpar.app.trace import run

    run(file, as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check this machine: versions, devices, and timed transfers between two ranks."""
    from ditpar.app.doctor import run

    raise typer.Exit(run(as_json))


@app.command()
def selftest(
    family: Annotated[list[str] | None, typer.Option(help="Only this family; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare every built method with one device, on this machine's devices."""
    from ditpar.app.selftest import run

    raise typer.Exit(run(family or [], as_json))


@app.command()
def conform(
    name: Annotated[str, typer.Argument(help="A family, or a transformer class.")],
    variant: Annotated[str | None, typer.Option(help="Only this variant.")] = None,
) -> None:
    """Prove every claim of a family record on tiny random models."""
    from ditpar.conformance.kit import conform as prove

    report = prove(name, variant)
    print(report)
    raise typer.Exit(exits.OK if report.ok else exits.ENGINE)


def _terminated(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def main() -> NoReturn:
    """Runs the command line and exits with 0, 2, 3, 5 or 130."""
    signal.signal(signal.SIGTERM, _terminated)
    as_json = "--json" in sys.argv
    try:
        code = app(prog_name="ditpar", standalone_mode=False)
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001  the last resort: a line and a code, not a traceback
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # usage errors know how to show themselves
            error.show()
            sys.exit(exits.USAGE)
        sys.exit(exits.report(error, as_json))
    if code == exits.INTERRUPTED:  # typer turns Ctrl-C into a code
        exits.report(KeyboardInterrupt(), as_json)
    sys.exit(code if isinstance(code, int) else exits.OK)


if __name__ == "__main__":
    main()
