import os
import time

from attention_tuner.tuner.processes.limit import Limit, session_cpu_s


def test_the_cpu_time_of_a_session_is_read() -> None:
    before = session_cpu_s(os.getsid(0))
    deadline = time.process_time() + 0.2
    while time.process_time() < deadline:
        pass
    assert session_cpu_s(os.getsid(0)) - before >= 0.15


def test_a_limit_of_wall_time_passes_and_says_how() -> None:
    limit = Limit(0.05)
    assert 0 < limit.left_s() <= 0.05
    time.sleep(0.06)
    assert limit.left_s() <= 0
    assert limit.reason == "gave no result within 0.05 s"
