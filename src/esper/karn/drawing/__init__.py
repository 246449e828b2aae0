"""The parts that pictures are made of: SVG as text, axes, labels, and charts from their specification."""
