"""The formats that references and ops share: quantized numbers, prepared weights, rotary layouts and MoE layers."""
