"""What the columns of a report mean, in one line each."""

from __future__ import annotations

from collections.abc import Iterable

MEANINGS = {
    "a task": "the score on its test rows after the last task; accuracy, or F1 where it says so: of label 1, or of entities "
    "where a task labels words",
    "average": "the mean of the tasks' scores: each counts the same",
    "forgetting": "how far a task is below its best score since it was learned; the mean over all tasks but the last",
    "BWT": "backward transfer: the score at the end minus the score right after learning; below 0 where tasks were forgotten",
    "ECE": "expected calibration error: how far confidence is from accuracy, in 15 bins; the mean over tasks",
    "a constant answer": "the best score that the same answer to every row has: what knows a task is above it",
    "a bag of words": "logistic regression on the words (TF-IDF) of the same training rows, without the model; the mean over "
    "seeds",
    "a linear probe": "logistic regression on the features of the pre-trained model, of the same training rows; the mean over "
    "seeds. Nothing of the model is trained",
    "best floor": "the mean over tasks of the best score without fine-tuning: of a constant answer, a bag of words, a linear "
    "probe",
    "bold": "the best of a column of strategies",
    "FWT": "forward transfer: the score of a task just before it is learned, minus that before training",
    "intransigence": "how far a task is below the model fine-tuned on it alone, right after learning",
    "forgetting of a task": "its best score since it was learned, minus its score at the end",
    "BWT to a version": "the score of a task's latest version at the end, minus that of its first version right after learning",
    "ECE of a task": "its expected calibration error after the last task",
    "agreement": "on how many test rows the answer is that of the model fine-tuned on the task alone",
    "(s)": "seconds of all tasks; a fine-tuned model that strategies share counts for the first that made it",
    "kept": "bytes beside the pre-trained model that answer for all tasks and let the next be learned",
    "of its region not owned before": "the share of the region that no earlier task owns",
    "region": "entries of the model that hold the task's skill",
    "owned": "those that no earlier task owns: the ones that this task trained",
    "overlap": "the share of the column's region that lies in the row's",
    "largest overlap": "the largest share of the region that lies in the region of one earlier task",
    "interval": "in brackets: where 95 of 100 lie when test rows and seeds are drawn anew (bootstrap over both; rows are drawn "
    "once for all strategies and seeds). With fewer than five seeds it is somewhat too narrow",
    "minus another": "the difference of the averages on equal rows and seeds; undecided: the interval holds 0",
    "kept above the floor": "(score − floor) / (score of fine-tune − floor): the share of what fine-tuning learned. The floor "
    "of a task is the best of those in the table of scores, that of the average is their mean; floors count as exact. — where "
    "fine-tune is not above the floor for certain",
    "noise floor": "the ECE that chance alone shows: that of a perfectly calibrated model with the same confidences, on as "
    "many rows",
    "ECE without noise": "ECE less what chance adds to it, estimated (Kumar et al., 2019)",
    "ECE after scaling": "ECE of the same answers after each task's logits were divided by one number, its temperature, fitted "
    "to validation rows (Guo et al., 2017)",
    "temperature": "that number, the mean over tasks: above 1 where the model was too sure",
    "a task, re-trained": "the score of a new linear readout (logistic regression), trained on the task's training rows with "
    "the model that answers for it at the end",
    "won by re-training": "that average minus the strategy's own: what the readout had forgotten, not the features",
    "once learned": "the score right after the task was learned",
}

#: What is told in another way where a task has a metric of a plug-in, of which lower may be better.
OF_OTHER_METRICS = {
    "a task": "the score on its test rows after the last task, by the metric that it says; accuracy where it says none",
    "forgetting": "how much worse a task is than its best score since it was learned; the mean over all tasks but the last",
    "BWT": "backward transfer: how much better the score at the end is than that right after learning; below 0 where tasks "
    "were forgotten",
    "a constant answer": "the best score that the same answer to every row has: what knows a task is better",
    "FWT": "forward transfer: how much better the score of a task is just before it is learned than before training",
    "intransigence": "how much worse a task is than the model fine-tuned on it alone, right after learning",
    "forgetting of a task": "how much worse its score is at the end than its best since it was learned",
    "BWT to a version": "how much better the score of a task's latest version is at the end than that of its first version "
    "right after learning",
    "won by re-training": "how much better these scores are than the strategy's own, on average: what the readout had "
    "forgotten, not the features",
}


def meanings(*names: str, metrics: Iterable[str] = ()) -> tuple[tuple[str, str], ...]:
    """Return the legend of columns.

    Args:
        names: of the columns.
        metrics: of the tasks; beside accuracy and F1, some things are told in another way.
    """
    other = {} if {*metrics} <= {"accuracy", "f1"} else OF_OTHER_METRICS
    return tuple((name, other.get(name, MEANINGS[name])) for name in names)
