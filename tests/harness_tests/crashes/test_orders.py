from __future__ import annotations

import msgspec

from harness.crashes.orders import Order, Report


def test_an_order_survives_a_line_of_json() -> None:
    order = Order("producer", "p", "mem://a", 3, first=2, options={"lanes": 1})
    assert msgspec.json.decode(msgspec.json.encode(order), type=Order) == order


def test_a_report_is_short_enough_to_be_written_whole() -> None:
    report = Report(2**22, "begun", "producer_99-" + "9" * 12, 10**12)
    assert len(msgspec.json.encode(report)) < 512
