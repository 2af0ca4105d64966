"""Run the peers' test files of folders on cukern: `python -m tests.peers FOLDER... [options] [arguments of pytest]`.

With `--jobs` several processes share the cases of all files, and files do not disturb each other.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import sys
import tempfile
from pathlib import Path

from tests.peers import tally, workers
from tests.peers.files import files_of, jobs_of
from tests.peers.turns import Part, Turns


def run_folder(folder: Path, options: argparse.Namespace, arguments: list[str]) -> int:
    """Run what is there in this process; the worst exit status."""
    from tests.peers import session

    session.prepare(folder)
    shares = {job.file: job.every for job in jobs_of(folder, options.only, options.every, options.most)}
    return max(
        session.run_file(folder, name, Turns(options.part, options.tally, shares[name]), arguments)
        for name in files_of(folder, options.only)
    )


def run_jobs(options: argparse.Namespace, arguments: list[str], work: Path) -> int:
    """Run all folders by `options.jobs` processes, and print the table; 1 if a case failed or was not run."""
    plan = workers.Plan(work, options.part, arguments)
    of_folders = (jobs_of(folder, options.only, options.every, options.most) for folder in options.folders)
    jobs = [job for of_folder in of_folders for job in of_folder]
    if not jobs:
        raise SystemExit(f"--only must be in the names of files, got {options.only}")
    # A program that ends this one with SIGTERM, such as `timeout`, gets the table too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    all_workers = workers.Workers(jobs, options.jobs, options.until, options.limit, plan, options.report)
    if options.until <= 0:
        print(all_workers.table())
        if options.page is not None:
            tally.fill(options.page, all_workers.cases(), all_workers.wholes())
        return 0
    try:
        cases = all_workers.run()
    finally:
        print(all_workers.table(), flush=True)
        if options.report is not None:
            workers.write(options.report, all_workers.table())
        if options.page is not None:
            tally.fill(options.page, all_workers.cases(), all_workers.wholes())
    is_whole = not any(all_workers.left().values()) and None not in all_workers.left().values()
    return int(not is_whole or any(case.outcome == "failed" for case in cases))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=lambda text: Path(text).resolve())
    parser.add_argument("--jobs", type=int, default=0, help="processes that run at the same time")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a case may take, with --jobs")
    parser.add_argument(
        "--until", type=float, default=86400, help="seconds after which no more cases are begun; 0: only show"
    )
    parser.add_argument(
        "--only", default="", help="files with one of these in their names: A,B or all others: --only=-A,-B"
    )
    parser.add_argument("--part", type=Part.of, default=Part(), help="INDEX/COUNT: the share of the cases to run")
    parser.add_argument("--every", type=int, default=1, help="of the cases of each test, one in so many")
    parser.add_argument(
        "--most", type=float, default=math.inf, help="process-seconds for a file; of long ones fewer cases are run"
    )
    parser.add_argument("--tally", type=Path, help="a file to write each case to, without --jobs")
    parser.add_argument("--resume", type=Path, help="a folder for what cases come to; those that it has are not run")
    parser.add_argument(
        "--page", type=Path, help="a page of Markdown with marks, whose tables are written, with --resume"
    )
    parser.add_argument("--report", type=Path, help="a file that has the table so far, with --jobs")
    options, arguments = parser.parse_known_args()
    with contextlib.ExitStack() as stack:
        work = options.resume or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        if options.jobs or len(options.folders) > 1 or options.resume:
            options.jobs = max(options.jobs, 1)
            return run_jobs(options, arguments, work)
        table = options.tally is None
        options.tally = options.tally or work / "cases.jsonl"
        status = run_folder(options.folders[0], options, arguments)
        if table:
            print(tally.table(tally.read(options.tally)))
    return status


if __name__ == "__main__":
    sys.exit(main())
