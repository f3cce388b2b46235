# Draws pipeline.svg from pipeline.dat in the current folder: bubble rates, simulated and measured, and
# the ratio of makespans. Called by run.sh.
set terminal svg noenhanced size 1000,460 font "Helvetica,13" background "white"
set output "pipeline.svg"
set title "ddp_pipeline.h: bubbles of 8 ranks; labels: measured makespan / simulated makespan" font ",15"
set style data histograms
set style histogram clustered gap 1
set style fill solid 0.9 border -1
set ylabel "bubble, % of the longest span"
set grid y lc rgb "#dddddd"
set key top right reverse Left samplen 1
set xtics rotate by 30 right font ",11"
set bmargin 7
stats "pipeline.dat" using ($4 > $5 ? $4 : $5) nooutput
set yrange [0:STATS_max * 1.15]
plot "pipeline.dat" using 4:xtic(1) title "simulated" lc rgb "#56b4e9", \
     "" using 5 title "measured" lc rgb "#0072b2", \
     "" using 0:($4 > $5 ? $4 : $5):(sprintf("%.3f", $6)) with labels offset 0,0.7 font ",11" notitle
