"""The page of the fault suite matches its files, and new results keep those of other runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.faults.report import Report, Verdict, read_results, write_results
from tests.faults.write_report import FAULTS, PAGE, PROMISES, render, written

SURVIVED = Verdict("F7", "fake", "resets", 20, "runs", 0, 7, 3.25, "120 groups")


def test_the_page_is_what_the_results_say() -> None:
    assert PAGE.read_text() == written()


def test_a_verdict_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    other = replace(SURVIVED, name="cuts")
    write_results(path, [SURVIVED, other])
    again = replace(SURVIVED, violations=1, again="pytest ...")
    write_results(path, [again])
    assert read_results(path) == [again, other]


def test_a_violation_is_on_the_page_wherever_it_counts() -> None:
    page = render([replace(SURVIVED, violations=1, again="pytest x")], "here", [])
    assert "| resets | fake | 20 runs | 1 | 7 | 3.2 | again: `pytest x` |" in page
    assert "| F7 | 1 |" in page
    assert "not run" in page


def test_what_was_skipped_is_said() -> None:
    skipped = replace(SURVIVED, fault="F6", count=0, skipped="needs root")
    page = render([skipped], "here", [])
    assert "- F6, resets: needs root" in page
    # Faults without any result are listed too.
    assert "- F23, kill -9 of the actors of a run on Ray: no result is kept here" in page
    assert "- F6, the network" not in page


def test_what_was_not_survived_is_said_with_the_way_to_it() -> None:
    report = Report(7, None, 200)
    report.failed("F24 fake", "a soak", 7, "tests/x.py::test_x", 3, 200, "--updates 200")
    (verdict,) = report.verdicts
    assert (verdict.fault, verdict.where, verdict.count, verdict.violations) == (
        "F24",
        "fake",
        4,
        1,
    )
    assert verdict.again == "pytest tests/x.py -k 'test_x' --fault-seed 7 --updates 200"


def test_a_verdict_is_kept_as_it_comes(tmp_path: Path) -> None:
    report = Report(7, 5, 200, results=tmp_path / "results.json")
    report.survived("F24 fake", "a soak", 5)
    assert read_results(tmp_path / "results.json") == report.verdicts
    report.failed("F24 fake", "another", 7, "tests/x.py::test_x", 3, 200)
    assert read_results(tmp_path / "results.json") == report.verdicts


def test_every_fault_holds_a_promise() -> None:
    assert {promise for _, held in FAULTS.values() for promise in held} == set(PROMISES)
