import pickle

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task


def test_equal_tasks_are_one_key_across_processes() -> None:
    def make(page_size: int) -> Task:
        return Task(AttentionSpec(8, 2, 64), Batch.parse("1x16@32"), page_size)

    task = make(16)
    assert pickle.loads(pickle.dumps(task)) == task
    assert {task, make(16), make(32)} == {task, make(32)}
