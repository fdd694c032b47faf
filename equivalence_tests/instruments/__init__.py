"""What every comparison uses: differences, weights, inputs, strategies, error cases."""
