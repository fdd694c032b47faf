"""Reports for other programs: JSON, JUnit XML, SARIF, and annotations of GitHub."""

import json
from collections.abc import Iterator, Sequence
from typing import Any
from xml.etree import ElementTree

from equivalence_tests.checker.reporting.findings import Finding
from equivalence_tests.checker.reporting.report import Report

__all__ = ["to_github", "to_json", "to_junit", "to_sarif"]

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def to_json(reports: Sequence[Report]) -> str:
    """Give one report as an object, and several as a list."""
    data = [report.to_dict() for report in reports]
    return json.dumps(data[0] if len(data) == 1 else data, indent=2)


def to_junit(reports: Sequence[Report]) -> str:
    """Give a test suite for each target, with a case for the diagnosis and one for each check."""
    suites = ElementTree.Element("testsuites")
    for report in reports:
        suites.append(_suite(report))
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode")


def to_sarif(reports: Sequence[Report]) -> str:
    """Give every finding as a result of the Static Analysis Results Interchange Format, version 2.1.0."""
    findings = [finding for report in reports for finding in report.findings]
    rules = {finding.name: {"id": finding.name, "shortDescription": {"text": finding.sentence}} for finding in findings}
    driver = {"name": "sidebyside verify", "rules": list(rules.values())}
    run = {"tool": {"driver": driver}, "results": [_result(finding) for finding in findings]}
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def to_github(reports: Sequence[Report]) -> Iterator[str]:
    """Give a line for each finding that GitHub's runner turns into an annotation of the code."""
    for report in reports:
        for finding in report.findings:
            place = f"file={finding.line.path},line={finding.line.number}," if finding.line else ""
            yield f"::error {place}title={_escaped(finding.name)}::{_escaped(finding.sentence + ' ' + finding.fix)}"
        if report.verdict == "unchecked":
            yield f"::warning title=could not be checked::{_escaped(report.title + ': ' + report.reason)}"


def _suite(report: Report) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name=f"verify {report.title}")
    for finding in report.findings:
        case = ElementTree.SubElement(suite, "testcase", classname=report.title, name=finding.name)
        ElementTree.SubElement(case, "failure", message=finding.sentence).text = _told(finding)
    for check in report.checks:
        case = ElementTree.SubElement(suite, "testcase", classname=report.title, name=check.name)
        if check.outcome == "failed":
            ElementTree.SubElement(case, "failure", message=check.detail)
        elif check.outcome != "passed":
            ElementTree.SubElement(case, "skipped", message=check.detail)
    if report.verdict in ("unchecked", "partial"):
        case = ElementTree.SubElement(suite, "testcase", classname=report.title, name="could_be_checked")
        missing = report.reason or "; ".join(f"{x.what}: {x.detail}" for x in report.not_exercised)
        ElementTree.SubElement(case, "error" if report.verdict == "unchecked" else "skipped", message=missing)
    if not len(suite):
        ElementTree.SubElement(suite, "testcase", classname=report.title, name="equal")
    for outcome, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(outcome, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite)))
    return suite


def _result(finding: Finding) -> dict[str, Any]:
    result: dict[str, Any] = {"ruleId": finding.name, "level": "error", "message": {"text": _told(finding)}}
    if finding.line:
        region = {"startLine": finding.line.number, "snippet": {"text": finding.line.text}}
        place = {"artifactLocation": {"uri": finding.line.path}, "region": region}
        result["locations"] = [{"physicalLocation": place}]
    return result


def _told(finding: Finding) -> str:
    parts = (finding.sentence, f"Have: {finding.have}.", f"Want: {finding.want}.", finding.fix)
    return " ".join(part for part in parts if part not in ("", "Have: .", "Want: ."))


def _escaped(text: str) -> str:
    """Write what GitHub's workflow commands reserve in their own notation."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
