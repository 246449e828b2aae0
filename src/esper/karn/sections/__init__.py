"""The parts of the terminal screen, one module per question: state in, lines of text out."""
