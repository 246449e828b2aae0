"""Drawing of charts as SVG: elements, axes, labels, and charts from a specification."""
