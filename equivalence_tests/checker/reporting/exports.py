"""Reports for other programs: JSON, JUnit XML, SARIF, and annotations of GitHub."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from equivalence_tests.checker.reporting.findings import Finding
from equivalence_tests.checker.reporting.report import Report

# Characters that an XML file may not hold, even escaped.
NOT_IN_XML = "[\x00-\x08\x0b\x0c\x0e-\x1f]"
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def to_json(reports: Sequence[Report]) -> str:
    """Give a list, however many reports there are; numbers that are not finite, which JSON lacks, as text."""
    plain = json.dumps([report.to_dict() for report in reports])
    data = json.loads(plain, parse_constant=lambda number: str(float(number)))
    return json.dumps(data, indent=2, allow_nan=False)


def to_junit(reports: Sequence[Report]) -> str:
    """Give a test suite for each target, with a case for the diagnosis and one for each check."""
    suites = ElementTree.Element("testsuites")
    for report in reports:
        suites.append(_suite(report))
    ElementTree.indent(suites)
    return re.sub(NOT_IN_XML, "", ElementTree.tostring(suites, encoding="unicode"))


def to_sarif(reports: Sequence[Report]) -> str:
    """Give every finding as a result of the Static Analysis Results Interchange Format, version 2.1.0."""
    findings = [finding for report in reports for finding in _blamed(report)]
    rules = {finding.name: {"id": finding.name, "shortDescription": {"text": finding.sentence}} for finding in findings}
    driver = {"name": "sidebyside verify", "rules": list(rules.values())}
    run = {"tool": {"driver": driver}, "results": [_result(finding) for finding in findings]}
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def to_github(reports: Sequence[Report]) -> Iterator[str]:
    """Give a line for each finding that GitHub's runner turns into an annotation of the code."""
    for report in reports:
        for finding in _blamed(report):
            place = f"file={_property(finding.line.path)},line={finding.line.number}," if finding.line else ""
            said = _escaped(f"{finding.sentence} {finding.fix}".strip())
            yield f"::error {place}title={_property(finding.name)}::{said}"
        if report.verdict == "unchecked":
            yield f"::warning title=could not be checked::{_escaped(report.title + ': ' + report.reason)}"


def _blamed(report: Report) -> list[Finding]:
    """What speaks against the code: the findings; where there are none, the reason why it deviates."""
    alone = report.verdict == "deviates" and not report.findings
    return [Finding("deviates", "checks", f"{report.title}: {report.reason}")] if alone else report.findings


def _suite(report: Report) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name=f"verify {report.title}")

    def add(name: str, tag: str = "", message: str = "", text: str | None = None) -> None:
        case = ElementTree.SubElement(suite, "testcase", classname=report.title, name=name)
        if tag:
            ElementTree.SubElement(case, tag, message=message).text = text

    for finding in report.findings:
        add(finding.name, "failure", finding.sentence, _message(finding))
    for check in report.checks:
        if check.outcome != "failed" or not report.findings:  # else it only follows from a finding
            tag = {"passed": "", "failed": "failure"}.get(check.outcome, "skipped")
            add(check.name, tag, check.detail)
    if report.verdict in ("unchecked", "partial"):
        missing = report.reason or "; ".join(f"{x.what}: {x.detail}" for x in report.not_exercised)
        add("could_be_checked", "error" if report.verdict == "unchecked" else "skipped", missing)
    if not len(suite):
        add("equal")
    for outcome, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(outcome, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite)))
    return suite


def _result(finding: Finding) -> dict[str, Any]:
    result: dict[str, Any] = {"ruleId": finding.name, "level": "error", "message": {"text": _message(finding)}}
    if finding.line:
        region = {"startLine": finding.line.number, "snippet": {"text": finding.line.text}}
        place = {"artifactLocation": {"uri": _uri(finding.line.path)}, "region": region}
        result["locations"] = [{"physicalLocation": place}]
    return result


def _message(finding: Finding) -> str:
    parts = (finding.sentence, f"Have: {finding.have}.", f"Want: {finding.want}.", finding.fix)
    return " ".join(part for part in parts if part not in ("", "Have: .", "Want: ."))


def _uri(path: str) -> str:
    return Path(path).as_uri() if Path(path).is_absolute() else quote(Path(path).as_posix())


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


def _escaped(text: str) -> str:
    """Write what GitHub's workflow commands reserve in their own notation."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
