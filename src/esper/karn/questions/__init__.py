"""What a run can be asked: one file per question, from its rows to numbers and from those to a picture."""
