"""SVG elements, axes, labels, and charts drawn from a specification."""
